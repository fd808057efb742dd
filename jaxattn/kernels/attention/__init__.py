"""What attention kernels of several families share: tile scheduler, work partition, work queue,
register layouts, the softmax's numbers and its end."""
