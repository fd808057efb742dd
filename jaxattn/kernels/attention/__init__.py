"""What attention kernels of several families share: tile scheduler, work partition, work queue."""
