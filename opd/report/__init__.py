"""Reports of a run: one self-contained page, the same page live, and figures. Reads run directories; needs no torch.

facts    a run directory as plain data: metrics, held-out scores, the graph of stages
words    the same in a paragraph
page     one self-contained HTML file, and a run in Jupyter
view     `opd view`: the page live, on loopback, with the rollout store
plot     `opd plot`: curves for papers
"""
