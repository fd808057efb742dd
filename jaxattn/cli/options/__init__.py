"""The argparse groups of the commands."""
