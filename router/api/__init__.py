"""The client APIs, the admin plane with its page, and what they share."""
