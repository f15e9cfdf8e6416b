"""The paper's data sets as jsonl that ``scaled.data`` reads; each is made anew, to the byte, from its source."""
