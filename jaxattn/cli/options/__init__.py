"""The commands' options: argparse groups, value types and checks."""
