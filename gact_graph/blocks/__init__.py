"""Message passing by blocks of destination nodes."""
