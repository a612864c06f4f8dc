"""What tests share: worker processes (`workers`) and small models and data sets made from nothing (`tiny`)."""
