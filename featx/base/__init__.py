"""What every package may use: limits of the machine, console output, text, paths, devices."""
