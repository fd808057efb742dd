"""Loading of weights from a disk or the Hub to the devices."""
