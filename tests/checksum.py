"""A reward for tests of the loop: it varies over the answers of a random model, and needs no knowledge."""


def score(response, problem):
    return sum(response.token_ids) % 11 / 10


def huge(response, problem):
    """Finite as a reward; in fp32 it is not."""
    return score(response, problem) * 1e40
