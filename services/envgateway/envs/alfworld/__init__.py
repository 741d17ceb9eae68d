"""``alfworld``: household tasks in text, by the real engine, spoken as AgentBench speaks."""
