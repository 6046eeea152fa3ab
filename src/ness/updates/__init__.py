"""The trainable update of a layer: its form, how it is installed, and a layer's state."""
