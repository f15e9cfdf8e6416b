"""Inside a vLLM engine: the weight transfer backend that applies an update's factors. Imports no trainer."""
