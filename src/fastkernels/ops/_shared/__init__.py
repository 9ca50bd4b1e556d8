"""Math, checks and test inputs that at least two operators need."""
