"""The default prompts of `python -m jaxattn.serve`.

They are beginnings of Python code, with varied greedy continuations by the embedded model. At every
byte, the best two logits differ by at least 0.1, far more than the rounding differences between
devices (tests/engine/test_greedy.py).
"""

PROMPTS = (
    (
        "import io\n"
        "import sys\n"
        "import unittest\n"
        "\n"
        "class SocketTestCase(unittest.TestCase):\n"
        "\n"
        "    def test_init(self):\n"
    ),
    ("class Color(Enum):\n    RED = 1\n    GREEN = 2\n    BLUE = 3\n\n    def __str__(self):\n"),
    (
        "def run():\n"
        '    """Run commands that the user types."""\n'
        "    while True:\n"
        "        try:\n"
        "            line = input('> ')\n"
        "        except (EOFError, KeyboardInterrupt):\n"
    ),
    ("def read_config(path):\n    '''Read the configuration from a file.'''\n"),
    (
        "from dataclasses import dataclass\n"
        "\n"
        "\n"
        "@dataclass\n"
        "class Rectangle:\n"
        "    name: str\n"
        "    age: int\n"
        "    email: str = ''\n"
        "\n"
        "    def __add__(self, other):\n"
    ),
    (
        "import argparse\n"
        "import sys\n"
        "\n"
        "\n"
        "def main():\n"
        '    """Run the program."""\n'
        "    parser = argparse.ArgumentParser(description='Print the lines of files.')\n"
        "    parser.add_argument('files', nargs='*', help='the files to read')\n"
        "    parser.add_argument('-v', '--verbose', action='store_true')\n"
        "    args = parser.parse_args()\n"
        "    if args."
    ),
)
