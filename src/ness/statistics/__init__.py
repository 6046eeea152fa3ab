"""What layers have seen: Grams, moments, spectra, and the recorder that fills them."""
