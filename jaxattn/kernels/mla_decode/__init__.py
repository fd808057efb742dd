"""MLA decode: launch.py is the kernel for many heads, columns_launch.py for few rows and FP8."""
