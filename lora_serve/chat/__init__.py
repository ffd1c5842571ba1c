"""Messages to a prompt, and an answer's text to its parts: reasoning, content, tool calls."""
