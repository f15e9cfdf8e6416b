"""Graders of answers: pure functions of texts, run in worker processes, since an answer is untrusted text.

A grader takes the gold answer, the response's text, whether the response was cut, and the row's metadata, and gives a
``Verdict``. Nothing here imports torch.
"""
