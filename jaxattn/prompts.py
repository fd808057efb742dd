"""placeholder"""

PROMPTS = ("class A:\n    def f(self):\n        x = 1\n",)
