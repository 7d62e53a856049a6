"""Protocol servers that stand in for the two hubs: the real clients talk to them over real sockets."""
