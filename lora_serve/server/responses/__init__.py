"""OpenAI's Responses API: a conversation of items, answered as a chat is, and kept for a while."""
