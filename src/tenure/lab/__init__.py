"""What is measured live on a loaded model: quality, speed, and the explanation made of both; and how it is drawn."""
