"""What `python -m jaxattn.serve` continues when it is given nothing.

Beginnings of Python whose greedy continuation by the embedded model is varied, and decided at every
byte: the best logit is ahead of the next by 0.2 or more, which is more than another device's
rounding changes (tests/test_greedy.py). After a change to the model or to these,
`python tests/make_greedy.py` says how far ahead it is.
"""

PROMPTS = (
    '''\
class Server:
    """A server of clients."""

    def __init__(self, size=10):
        self._clients = []
        self._lock = threading.Lock()
        self.size = size

    def save(self, filename):
        """Write everything to a file."""
        try:
''',
    '''\
import io
import sys
import unittest

class SocketTestCase(unittest.TestCase):

    def test_init(self):
''',
    '''\
import os


def load_config(path):
    """Read the configuration from a file."""
''',
    '''\
import argparse

def _main():
    """Print the lines of some files."""
    parser = argparse.ArgumentParser(prog='count', description='Count the words of files.')
    parser.add_argument('-o', '--output', metavar='FILE',
                        help='where to write the result')
    args = parser.parse_args(argv)
    try:
''',
    '''\
import os
import sys


def load_file(path):
    """Read a file, or return None if there is none."""
    try:
        with open(path, 'r') as f:
            data = f.read()
    except IOError as err:
        if \
''',
    '''\
from enum import Enum


class Weekday(Enum):
    MONDAY = 1
    TUESDAY = 2
    WEDNESDAY = 3

    def __lt__(self, other):
''',
)
