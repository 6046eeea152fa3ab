"""What is made of finished runs: tables, figures, and one page to look at."""
