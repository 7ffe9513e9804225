"""Small random models of every transformers family, built from rules on field names, with inputs that they accept."""
