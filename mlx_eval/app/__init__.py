"""What joins models, harness and results into one job."""
