"""Conversations: from the columns of a row to token ids and targets."""
