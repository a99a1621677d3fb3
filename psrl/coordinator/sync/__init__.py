"""When an instance pulls new weights: one file a strategy behind one protocol, all pure."""
