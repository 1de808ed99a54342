"""How hosts, ports and servers are written: HOST:PORT, and URLs of Redis. Standard library only."""
