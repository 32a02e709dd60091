"""What a run has to show: one self-contained page, the same page live, and figures. Reads run directories; needs no torch.

facts    what a run directory says, as plain data     words    the same in a paragraph
graph    stages and the models between them           page     one HTML file that needs nothing else
browse   the rollout store, by filter and page        view     `opd view`: the page live, on loopback
plot     `opd plot`: curves for papers                notebook a run as Jupyter shows it
measured held-out scores, also of runs that have not ended
"""
