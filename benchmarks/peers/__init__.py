"""Other engines, installed and started beside ours. One file a peer."""
