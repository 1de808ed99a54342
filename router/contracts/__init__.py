"""What the router's rooms share: requests, events, answers and the Protocols between the rooms."""
