"""The page for operators: static files, and the JSON that they read, on the admin HTTP port."""
