"""What job=bench compares: pictures to compare on, the contenders, and each stage alone."""
