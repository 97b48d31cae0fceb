// A calculator of matrices: what the build job compiles and tests.
#ifndef MATRIX_HPP
#define MATRIX_HPP

#include <cstddef>
#include <iosfwd>
#include <string>
#include <vector>

class Matrix {
public:
    Matrix(std::size_t rows, std::size_t columns, double value = 0.0);
    // Rows are separated by ';', numbers by spaces. Throws std::invalid_argument for any other text.
    static Matrix parse(const std::string& text);
    static Matrix identity(std::size_t size);

    std::size_t rows() const { return rows_; }
    std::size_t columns() const { return columns_; }
    double& at(std::size_t row, std::size_t column);
    double at(std::size_t row, std::size_t column) const;

    Matrix transposed() const;
    // Throw std::invalid_argument if the sizes do not fit.
    Matrix plus(const Matrix& other) const;
    Matrix times(const Matrix& other) const;
    Matrix scaled(double factor) const;
    double determinant() const;
    // Throws std::domain_error for a singular matrix.
    Matrix inverse() const;
    Matrix power(unsigned exponent) const;
    bool near(const Matrix& other, double tolerance) const;

private:
    std::size_t rows_;
    std::size_t columns_;
    std::vector<double> values_;
};

std::ostream& operator<<(std::ostream& out, const Matrix& matrix);

// Evaluates "A + B", "A * B", "A ^ 3", "det A", "inv A" and "A'" of matrices in brackets, such as "[1 2; 3 4] * [1 0; 0 1]".
Matrix evaluate(const std::string& expression);

#endif
