"""How long things take, and what memory they take: one command each."""
