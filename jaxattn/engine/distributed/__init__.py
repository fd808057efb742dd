"""One engine over several processes: process group, transport and driver."""
