"""A reward for tests of the loop: it varies over the answers of a random model, and needs no knowledge."""


def score(response, problem):
    return sum(response.token_ids) % 11 / 10
