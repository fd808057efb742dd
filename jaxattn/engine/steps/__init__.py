"""The compiled steps: the rows on the device, and the arguments and results of each executable."""
