"""`opd serve`: models that score for runs elsewhere, behind HTTP.

models.py   served models, and the thread that scores: waiting requests share a forward pass
app.py      routes, tokens, limits, errors, slow clients, draining
server.py   the command
"""
