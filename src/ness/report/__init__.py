"""What is made of finished runs: tables and figures."""
