"""Parts that attention kernels share: tile scheduler, work partition, layouts, softmax and
epilogue."""
