//! Puts programs with many jumps together.

use std::io;

use crate::{Instruction, code::JUMP, instruction};

/// A program in the making, whose jumps name their targets.
#[derive(Debug, Default)]
pub struct Assembly {
    code: Vec<Instruction>,
    /// Each jump, by its place, and where it leads.
    jumps: Vec<(usize, Label)>,
    /// The place of each label.
    places: Vec<Option<usize>>,
}

/// The target of jumps.
#[derive(Debug, Clone, Copy)]
pub struct Label(usize);

impl Assembly {
    /// Returns a label for a later place.
    pub fn label(&mut self) -> Label {
        self.places.push(None);
        Label(self.places.len() - 1)
    }

    /// Puts the label before the next instruction.
    pub fn place(&mut self, label: Label) {
        self.places[label.0] = Some(self.code.len());
    }

    /// Appends an instruction; `to` and `from` are numbers of registers.
    pub fn push(&mut self, code: u8, to: u8, from: u8, offset: i16, immediate: i32) {
        self.code.push(instruction(code, to, from, offset, immediate));
    }

    /// Appends a jump that compares a register with a constant.
    pub fn jump_if(&mut self, code: u8, register: u8, immediate: i32, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.push(code, register, 0, 0, immediate);
    }

    /// Appends a jump.
    pub fn jump(&mut self, label: Label) {
        self.jump_if(JUMP, 0, 0, label);
    }

    /// Returns the program.
    pub fn finish(mut self) -> io::Result<Vec<Instruction>> {
        for (jump, Label(label)) in self.jumps {
            let place = self.places[label].ok_or_else(|| io::Error::other("a jump leads nowhere"))?;
            let skipped = i16::try_from(place.wrapping_sub(jump + 1)).map_err(io::Error::other)?;
            self.code[jump].offset = skipped;
        }
        Ok(self.code)
    }
}
