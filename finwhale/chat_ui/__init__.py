"""What a person sees of a served model: a chat in the terminal and a chat page."""
