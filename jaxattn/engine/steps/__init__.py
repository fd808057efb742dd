"""The compiled steps: the device batch, and what each executable takes and returns."""
