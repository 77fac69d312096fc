"""Routes that trainers of other libraries call: new weights, and samples as token ids."""
