"""`opd serve`: models that score for runs elsewhere, behind HTTP.

models.py   what is served: weights, the head's frame, hashes
worker.py   the one thread that scores; requests that wait together share a forward pass
app.py      addresses, tokens, limits, refusals
server.py   the socket: slow clients, draining, the command
"""
