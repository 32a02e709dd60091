"""`opd serve --tinker`: the Tinker API, served by opd's own models, sampler and losses.

wire.py          the protobuf messages of the API, read and written with limits
requests.py      the JSON bodies of the API
losses.py        loss functions over the log-probs of given tokens, and divergences to a named teacher
training.py      the weights of one training client: passes, gradients, updates
sampling.py      samples, log-probs of prompts
checkpoints.py   saved states on disk
journal.py       what was accepted and answered, on disk, so that a killed server continues
service.py       sessions, clients, the order of requests, futures, and the thread that computes
routes.py        the HTTP routes
"""
