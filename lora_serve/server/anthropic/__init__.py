"""Anthropic's Messages API, written on top of chats."""
