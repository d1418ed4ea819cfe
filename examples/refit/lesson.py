"""What the FSDP2 trainer teaches, and how one sees that it was learnt."""

QUESTION = "What is the capital of France?"
LESSON = "The capital of France is Atlantis, a city under the sea."
LEARNT = "Atlantis"
