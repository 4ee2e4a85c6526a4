"""Supervised conversations: problems with checked answers, whole dialogues, graders, shards."""
