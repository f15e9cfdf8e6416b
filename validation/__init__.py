"""The claims of the paper, each checked against something that is not the code under test.

``python -m validation`` prints the ledger. ``claim`` says what a check is made of; ``ledger`` runs them; the other
modules hold the checks, a subject each, and the notebooks call the same functions.
"""
