"""Scheduling of attention kernels: tile scheduler, work partition and work queue."""
