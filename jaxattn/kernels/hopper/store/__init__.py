"""Stores to shared and global memory."""
